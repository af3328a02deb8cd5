"""The files of deploy/ are valid, and our commands and torchrun's take the options in them."""

import functools
import json
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from fastapi import FastAPI
from packaging.requirements import Requirement
from sqlalchemy import make_url
from torch.distributed.run import parse_args

from worldmodel import config as configs
from worldmodel.cli import flow, serve
from worldmodel.config.flow import FlowConfig
from worldmodel.flow.catalog.chain import Chain
from worldmodel.serving.metrics import Metrics
from worldmodel.serving.replicas import database
from worldmodel.serving.routes import health
from worldmodel.serving.settings import MIB

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
KUBERNETES = "1.32"
"""Version of the schemas."""


@functools.cache
def objects(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The objects of a manifest by kind and name."""
    found = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def core(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The object, or what its controller makes of it if its schema is not in Kubernetes."""
    if item["kind"] == "JobSet":
        yield from jobs_of(item)
    elif item["kind"] == "RayJob":
        yield from pods_of(item)
    else:
        yield item


def pods_of(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The pods of KubeRay, whose fields outside of pods are those of its resource definition v1."""
    assert item["apiVersion"] == "ray.io/v1"
    spec = item["spec"]
    assert set(spec) <= {
        *("activeDeadlineSeconds", "backoffLimit", "entrypoint", "rayClusterSpec", "runtimeEnvYAML"),
        *("shutdownAfterJobFinishes", "submissionMode", "suspend", "ttlSecondsAfterFinished"),
    }
    assert spec["submissionMode"] in ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")
    cluster = spec["rayClusterSpec"]
    assert set(cluster) == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    assert set(cluster["headGroupSpec"]) == {"rayStartParams", "template"}
    sizes = {"replicas", "minReplicas", "maxReplicas"}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        name = f"{item['metadata']['name']}-{group.get('groupName', 'head')}"
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, **group["template"]}
    for group in cluster["workerGroupSpecs"]:
        assert set(group) == {"groupName", "rayStartParams", "template", *sizes}
        assert len({group[each] for each in sizes}) == 1  # the flow needs all of them when it begins


def jobs_of(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The Jobs of a JobSet."""
    assert item["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert set(item["spec"]) <= {"network", "failurePolicy", "replicatedJobs", "successPolicy", "suspend"}
    assert set(item["spec"]["network"]) <= {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"}
    assert set(item["spec"]["failurePolicy"]) <= {"maxRestarts", "rules", "restartStrategy"}
    for job in item["spec"]["replicatedJobs"]:
        assert set(job) == {"name", "replicas", "template"}
        name = f"{item['metadata']['name']}-{job['name']}-0"
        yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, **job["template"]}


def pods() -> Iterator[tuple[Path, dict[str, Any]]]:
    """The specification of every pod, with its manifest."""
    for path in MANIFESTS:
        for item in objects(path).values():
            for each in core(item):
                spec = each.get("spec", {})
                spec = spec.get("jobTemplate", {}).get("spec", spec)
                if each["kind"] == "Pod":
                    yield path, spec
                elif "template" in spec:
                    yield path, spec["template"]["spec"]


def config_of(path: Path, name: str, folder: Path) -> Path:
    """Write the config in a ConfigMap to a folder."""
    (text,) = objects(path)["ConfigMap", name]["data"].items()
    (folder / text[0]).write_text(text[1], encoding="utf-8")
    return folder / text[0]


def options(command: list[str]) -> dict[str, Any]:
    """Return torchrun's options, as its own parser reads them."""
    assert command[0] == "torchrun"
    return vars(parse_args(command[1:]))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_match_the_schemas_of_kubernetes(path: Path) -> None:
    for item in objects(path).values():
        for each in core(item):
            kubernetes_validate.validate(each, KUBERNETES, strict=True)


def test_a_wrong_field_is_found() -> None:
    wrong = {**objects(DEPLOY / "kubernetes" / "serve.yaml")["Service", "worldmodel-serve"], "specs": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


def test_pods_run_without_privileges_and_mount_what_there_is() -> None:
    found = list(pods())
    # serve, its replicas with nginx and PostgreSQL, flow, compact, train, and head and workers of Ray
    assert len(found) == 10
    for path, pod in found:
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
        maps = [volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume]
        assert all(("ConfigMap", name) in objects(path) for name in maps)


def test_serving_takes_its_arguments_and_has_the_paths_of_the_probes() -> None:
    found = objects(DEPLOY / "kubernetes" / "serve.yaml")
    service = found["Service", "worldmodel-serve"]
    container = check_server(found["Deployment", "worldmodel-serve"], service)
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]


def check_server(controller: dict[str, Any], service: dict[str, Any]) -> dict[str, Any]:
    """Check the pods of servers; returns their container."""
    pod = controller["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    verb, *arguments = container["args"]
    args = serve._parse(arguments)
    (port,) = container["ports"]
    assert (verb, args.host, args.port) == ("serve", "0.0.0.0", port["containerPort"])
    assert args.drain_timeout_s < pod["spec"]["terminationGracePeriodSeconds"]
    assert args.data_dir in [mount["mountPath"] for mount in container["volumeMounts"]]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    app = FastAPI()
    app.include_router(health.router)
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    assert (probes["liveness"]["path"], probes["readiness"]["path"]) == ("/health", "/ready")
    assert {probe["path"] for probe in probes.values()} <= set(app.openapi()["paths"])
    assert container["readinessProbe"]["timeoutSeconds"] > database.RETRY_S
    return container


def names_of_upstream(conf: str) -> list[str]:
    return re.findall(r"^\s*server (\S+:\d+) .*resolve;$", conf, flags=re.MULTILINE)


def test_replicas_share_a_database_and_a_folder_behind_nginx() -> None:
    found = objects(DEPLOY / "kubernetes" / "replicas.yaml")
    replicas, service = found["StatefulSet", "worldmodel-serve"], found["Service", "worldmodel-serve"]
    container = check_server(replicas, service)
    args = serve._parse(container["args"][1:])
    (volume,) = replicas["spec"]["template"]["spec"]["volumes"]
    claim = found["PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    url = make_url(args.database)
    postgres = found["Deployment", url.host]["spec"]["template"]["spec"]["containers"][0]
    given = {each["name"]: each for each in postgres["env"]}
    assert (url.drivername, given["POSTGRES_USER"]["value"]) == ("postgresql", url.username)
    assert found["Service", url.host]["spec"]["ports"][0]["port"] == postgres["ports"][0]["containerPort"]
    secrets = [each["secretRef"]["name"] for each in container["envFrom"]]
    assert given["POSTGRES_PASSWORD"]["valueFrom"]["secretKeyRef"]["name"] in secrets
    conf = found["ConfigMap", "worldmodel-nginx"]["data"]["nginx.conf"]
    domain, port = f"{service['metadata']['name']}.default.svc.cluster.local", args.port
    pods = [f"{replicas['metadata']['name']}-{index}" for index in range(replicas["spec"]["replicas"])]
    assert names_of_upstream(conf) == [f"{pod}.{domain}:{port}" for pod in pods]
    here = (DEPLOY / "replicas" / "nginx.conf").read_text(encoding="utf-8")
    different = {line.split()[0] for line in set(conf.splitlines()) ^ set(here.splitlines())}
    assert different == {"resolver", "server"}
    (most,) = re.findall(r"client_max_body_size (\d+)m;", here)
    assert int(most) * MIB >= MIB + args.max_upload_bytes * 4 / 3  # a video in the JSON of a chat


def test_compose_starts_the_replicas_that_nginx_names() -> None:
    found = yaml.safe_load((DEPLOY / "replicas" / "compose.yaml").read_text(encoding="utf-8"))
    services, conf = found["services"], (DEPLOY / "replicas" / "nginx.conf").read_text(encoding="utf-8")
    names = [name for name in services if name.startswith("serve-")]
    verbs = {services[name]["command"][0] for name in names}
    parsed = [serve._parse(services[name]["command"][1:]) for name in names]
    assert verbs == {"serve"}
    assert names_of_upstream(conf) == [
        f"{name}:{args.port}" for name, args in zip(names, parsed, strict=True)
    ]
    (url,) = {make_url(args.database) for args in parsed}
    postgres = services[url.host]["environment"]
    assert (postgres["POSTGRES_USER"], postgres["POSTGRES_DB"]) == (url.username, url.database)
    assert postgres["POSTGRES_PASSWORD"] == services["serve-0"]["environment"]["PGPASSWORD"]
    mounted = {each.split(":")[0] for service in services.values() for each in service.get("volumes", [])}
    assert mounted - {"./nginx.conf"} == set(found["volumes"])
    assert {f"data:{args.data_dir}" for args in parsed} == set(services["serve-0"]["volumes"])
    for name in names:
        assert "/ready" in services[name]["healthcheck"]["test"][-1]
        assert int(services[name]["stop_grace_period"].removesuffix("s")) > parsed[0].drain_timeout_s
        assert set(services[name]["depends_on"]) <= set(services)


def test_the_flow_and_its_compaction_take_their_arguments_and_config(tmp_path: Path) -> None:
    path = DEPLOY / "kubernetes" / "flow.yaml"
    run = objects(path)["Job", "worldmodel-flow"]["spec"]["template"]["spec"]["containers"][0]
    job = objects(path)["CronJob", "worldmodel-flow-compact"]["spec"]["jobTemplate"]["spec"]
    compact = job["template"]["spec"]["containers"][0]
    for container, what in ((run, "run"), (compact, "compact")):
        args = flow._parser().parse_args(container["args"][1:])
        assert (container["args"][0], args.what) == ("flow", what)
        assert args.config == f"{container['volumeMounts'][0]['mountPath']}/flow.yaml"
    args = flow._parser().parse_args(run["args"][1:])
    assert (args.metrics_port, args.metrics_host) == (run["ports"][0]["containerPort"], "0.0.0.0")
    config = configs.load(config_of(path, "worldmodel-flow", tmp_path), [], FlowConfig)
    assert Chain.of(config).names == ["fetch", "probe", "filter", "pack"]
    assert config.catalog.startswith("postgresql+psycopg://")
    assert config.buffer.startswith("s3://") and config.log.startswith("s3://")


def test_the_flow_on_ray_fits_its_cluster(tmp_path: Path) -> None:
    path = DEPLOY / "kubernetes" / "flow-ray.yaml"
    spec = objects(path)["RayJob", "worldmodel-flow-ray"]["spec"]
    program, verb, *arguments = shlex.split(spec["entrypoint"])
    args = flow._parser().parse_args(arguments)
    assert (program, verb, args.what, args.config) == (
        "worldmodel",
        "flow",
        "run",
        "/etc/worldmodel/flow.yaml",
    )
    config = configs.load(config_of(path, "worldmodel-flow-ray", tmp_path), args.overrides, FlowConfig)
    assert config.executor == "ray"
    links = Chain.of(config).links
    groups, head = spec["rayClusterSpec"]["workerGroupSpecs"], spec["rayClusterSpec"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    for resource, needed in {
        "cpu": sum(link.workers * link.stage.resources.cpu for link in links),
        "nvidia.com/gpu": sum(link.workers * link.stage.resources.gpu for link in links),
    }.items():
        limits = [each["template"]["spec"]["containers"][0]["resources"]["limits"] for each in groups]
        offered = [
            int(limit.get(resource, 0)) * group["replicas"]
            for limit, group in zip(limits, groups, strict=True)
        ]
        assert 0 < needed <= sum(offered), resource
    memory_gb = sum(link.workers * link.stage.resources.memory_gb for link in links)
    sizes = [
        int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"].removesuffix("Gi"))
        * group["replicas"]
        for group in groups
    ]
    assert memory_gb <= 0.7 * sum(sizes), "Ray keeps the rest for its objects"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (need,) = extras["ray"]
    assert Requirement(need).specifier.contains(spec["rayClusterSpec"]["rayVersion"])
    assert "default" in Requirement(need).extras, "it has the server that takes jobs"
    shared = ("catalog", "buffer", "log")
    other = config_of(DEPLOY / "kubernetes" / "flow.yaml", "worldmodel-flow", tmp_path)
    same = configs.load(other, [], FlowConfig)
    assert [getattr(config, name) for name in shared] == [getattr(same, name) for name in shared]


def test_the_training_starts_torchrun_on_the_log_of_the_flow(tmp_path: Path) -> None:
    path = DEPLOY / "kubernetes" / "train.yaml"
    jobset = objects(path)["JobSet", "worldmodel-train"]
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    found = options(pod["containers"][0]["command"])
    first = f"{jobset['metadata']['name']}-{replicated['name']}-0-0.{jobset['spec']['network']['subdomain']}"
    assert found["rdzv_endpoint"] == f"{first}:29400"
    assert jobset["spec"]["network"]["publishNotReadyAddresses"] is True
    assert job["completionMode"] == "Indexed"
    assert found["nnodes"] == f"1:{job['parallelism']}" == f"1:{job['completions']}"
    assert found["nproc_per_node"] == str(pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert found["shutdown_timeout"] < pod["terminationGracePeriodSeconds"]
    assert (found["training_script"], found["module"]) == ("worldmodel", True)
    verb, config, *overrides = found["training_script_args"]
    assert (verb, config) == ("train", "/etc/worldmodel/train.yaml")
    loaded = configs.load(config_of(path, "worldmodel-train", tmp_path), overrides)
    (source,) = loaded.data.sources.values()
    values = objects(DEPLOY / "kubernetes" / "flow.yaml")["ConfigMap", "worldmodel-flow"]["data"]["flow.yaml"]
    assert (source.kind, source.path) == ("flow", yaml.safe_load(values)["log"])
    assert loaded.run_dir == "/shared/run1"


def test_the_slurm_script_starts_torchrun() -> None:
    script = DEPLOY / "train.slurm"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text().replace("\\\n", " ")
    command = shlex.split(text[text.index("torchrun") :].splitlines()[0])
    found = options(command)
    warning = re.search(r"--signal=TERM@(\d+)", text)
    assert warning is not None
    assert found["shutdown_timeout"] < int(warning[1])
    assert (found["training_script"], found["module"]) == ("worldmodel.train.finetune", True)


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_slurm_script_of_a_flow_trains_on_the_first_node(nodes: int, tmp_path: Path) -> None:
    """Slurm's commands are replaced by scripts that write down what they are asked for."""
    said = tmp_path / "said"
    others = f"until [ $(wc -l <{said}) = {min(nodes, 2)} ]; do sleep 0.02; done; exit 3"
    scripts = {
        "srun": f'printf -v line \'%q \' "$@"; echo "$line" >>{said}\n'
        f'case "$*" in *--train*) {others};; *) exec sleep 60; esac',
        "scontrol": "echo node0; echo node1; echo node2",
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[0-2]",
        "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_GPUS_ON_NODE": "8",
    }  # fmt: skip
    command = ["bash", str(DEPLOY / "flow.slurm"), "flow.yaml", "train.yaml", "run_dir=a b"]
    assert subprocess.run(command, env=environment, timeout=30).returncode == 3  # the training's
    lines = sorted(said.read_text().splitlines(), key=lambda line: "--train" in line)
    assert len(lines) == min(nodes, 2)
    steps = [line.partition("worldmodel flow ") for line in lines]
    args, overrides = flow._split(shlex.split(steps[-1][2]))
    parsed = flow._parser().parse_args(args)
    assert "--nodelist node0" in steps[-1][0]
    assert (parsed.what, parsed.config, parsed.train, parsed.processes) == (
        "run",
        "flow.yaml",
        "train.yaml",
        8,
    )
    assert overrides == ["run_dir=a b"]
    if nodes > 1:
        assert "--nodes 2 --ntasks 2 --exclude node0" in steps[0][0]
        assert flow._parser().parse_args(steps[0][2].split()).what == "run"


def test_the_container_installs_what_there_is_and_does_not_run_as_root() -> None:
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    names = set(" ".join(re.findall(r"^COPY (?!--)(.*) \S+$", text, flags=re.MULTILINE)).split())
    assert all((ROOT / name).exists() for name in names)
    linked = {path.name for path in (ROOT / "worldmodel").iterdir() if path.is_symlink()}
    assert {"worldmodel", *linked} <= names
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (installed,) = re.findall(r"^ARG EXTRAS=(.*)$", text, flags=re.MULTILINE)
    assert set(installed.split(",")) <= set(extras)
    assert re.findall(r"^USER (.*)$", text, flags=re.MULTILINE) == ["1000"]


def test_the_command_of_the_guide_is_one_of_torchrun() -> None:
    guide = (ROOT / "docs" / "how-to" / "multi-node.md").read_text().replace("\\\n", " ")
    (command,) = re.findall(r"^\$ (torchrun .*)$", guide, flags=re.MULTILINE)
    found = options(shlex.split(command))
    assert found["training_script_args"] == ["my.yaml", "run_dir=/shared/run1"]


def test_the_commands_of_the_guide_name_files_that_exist() -> None:
    guide = "".join((ROOT / "docs" / "how-to" / f"{name}.md").read_text() for name in ("deploy", "replicas"))
    named = set(re.findall(r"deploy/[\w./-]*\w", guide))
    assert {f"deploy/kubernetes/{path.name}" for path in MANIFESTS} <= named
    assert {"deploy/Containerfile", "deploy/flow.slurm", "deploy/train.slurm"} <= named
    assert all((ROOT / name).exists() for name in named)


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"worldmodel_[a-z_]+", target["expr"])
    }
    metrics = Metrics()
    metrics.request("steps", "ok")
    metrics.reject("rate_limit")
    metrics.chunk(0.1, 1.0)
    metrics.jobs.labels(outcome="completed").inc()
    metrics.model_seconds.labels(key="alice", purpose="step").inc(0.1)
    known = set(re.findall(r"^(worldmodel_[a-z_]+)", metrics.text().decode(), flags=re.MULTILINE))
    assert asked <= known
    families = {family.name for family in metrics.registry.collect()}
    assert {re.sub(r"_(bucket|total)$", "", name) for name in asked} == families
