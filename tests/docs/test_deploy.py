"""The manifests of deploy/ are valid, and torchrun takes their options."""

import re
import shlex
import subprocess
from pathlib import Path

import yaml
from torch.distributed.run import parse_args

ROOT = Path(__file__).parents[2]


def options(command: list[str]) -> dict[str, object]:
    """Return torchrun's options, as its own parser reads them."""
    assert command[0] == "torchrun"
    return vars(parse_args(command[1:]))


def test_the_kubernetes_job_starts_torchrun() -> None:
    service, job = yaml.safe_load_all((ROOT / "deploy" / "train.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    found = options(container["command"])
    host = f"{job['metadata']['name']}-0.{service['metadata']['name']}"  # pod 0's name in the service
    assert found["rdzv_endpoint"] == f"{host}:29400"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert found["nnodes"] == f"1:{job['spec']['parallelism']}"
    assert found["shutdown_timeout"] < pod["terminationGracePeriodSeconds"]
    assert (found["training_script"], found["module"]) == ("worldmodel.train.finetune", True)
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_slurm_script_starts_torchrun() -> None:
    script = ROOT / "deploy" / "train.slurm"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text().replace("\\\n", " ")
    command = shlex.split(text[text.index("torchrun") :].splitlines()[0])
    found = options(command)
    warning = re.search(r"--signal=TERM@(\d+)", text)
    assert warning is not None
    assert found["shutdown_timeout"] < int(warning[1])
    assert (found["training_script"], found["module"]) == ("worldmodel.train.finetune", True)


def test_the_command_of_the_guide_is_one_of_torchrun() -> None:
    guide = (ROOT / "docs" / "how-to" / "multi-node.md").read_text().replace("\\\n", " ")
    (command,) = re.findall(r"^\$ (torchrun .*)$", guide, flags=re.MULTILINE)
    found = options(shlex.split(command))
    assert found["training_script_args"] == ["my.yaml", "run_dir=/shared/run1"]
