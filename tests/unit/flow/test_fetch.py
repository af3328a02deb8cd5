"""The stage fetch, against a real server and local files."""

import asyncio
import hashlib
import ipaddress
import socket
import time
from pathlib import Path
from typing import Any

import httpcore
import httpx
import pyarrow as pa
import pytest
from flow_stages import flow_config
from web import content, drip, endless, ranges, served, status

from worldmodel.config.flow import FlowConfig
from worldmodel.errors import ConfigError
from worldmodel.flow.download import robots
from worldmodel.flow.download.guard import is_public
from worldmodel.flow.download.http import Transfer, licence_link
from worldmodel.flow.download.robots import Robots
from worldmodel.flow.stages import find_stage
from worldmodel.flow.stages.fetch import Fetch
from worldmodel.flow.work.run import run_flow
from worldmodel.flow.work.work import MAX_DELAY_S, delay_s

PUBLIC_IP = "93.184.215.14"
NOBODY = "http://127.0.0.1:1/clip.mp4"


@pytest.fixture(scope="module")
def video(counting: Path) -> bytes:
    return counting.read_bytes()


def fetch(*addresses: str | None, **settings: Any) -> list[dict[str, Any]]:
    """Run the stage as a worker does."""
    settings = {"allow_private": True, "robots": "ignore", "read_timeout_s": 2.0, **settings}
    names = [str(number) for number in range(len(addresses))]
    batch = pa.record_batch({"clip": names, "address": pa.array(addresses, pa.string())})
    stage = find_stage("fetch")
    return stage.checked(batch, stage.make(**settings)(batch)).to_pylist()


def test_a_video_is_fetched_with_its_facts(video: bytes) -> None:
    licence = '<https://creativecommons.org/licenses/by/4.0/>; rel="license"'
    with served(clip=content(video, Link=licence), moved=status(302, Location="/clip")) as web:
        row, moved = fetch(web.url("/clip"), web.url("/moved"))
        address = web.url("/clip")
    assert row == {
        "clip": "0", "video": video, "sha256": hashlib.sha256(video).hexdigest(), "num_bytes": len(video),
        "media_type": "video/mp4", "final_address": address, "robots": "ignored",
        "licence_link": "https://creativecommons.org/licenses/by/4.0/", "drop": None, "retry": None,
        "retry_after_s": None,
    }  # fmt: skip
    assert moved["final_address"] == address
    assert moved["video"] == video


def test_a_broken_connection_is_resumed_where_it_ended(video: bytes) -> None:
    with served(clip=ranges(video, breaks_after=len(video) // 3)) as web:
        (row,) = fetch(web.url("/clip"))
        asked = [headers.get("Range", "") for _, headers in web.asked]
    assert row["video"] == video
    third = len(video) // 3
    assert asked[:3] == ["", f"bytes={third}-", f"bytes={2 * third}-"]


def test_a_file_that_changed_is_not_joined_with_its_older_part(video: bytes) -> None:
    other = video[::-1]

    def answer(exchange: Any) -> None:
        if exchange.number == 0:
            ranges(other[:0] + video[:64] + other, breaks_after=600, etag='"old"')(exchange)
        else:
            ranges(video, etag='"new"')(exchange)

    with served(clip=answer) as web:
        (row,) = fetch(web.url("/clip"))
    assert row["video"] == video


@pytest.mark.parametrize("total", [True, False])
def test_a_host_that_sends_less_of_a_range_than_is_asked_for_is_asked_again(
    video: bytes, total: bool
) -> None:
    def answer(exchange: Any) -> None:
        asked = exchange.headers.get("Range")
        start = int(asked[6:].split("-")[0]) if asked else 0
        some = video[start : start + len(video) // 3 + 1]
        length = str(len(some) if asked else len(video))
        headers = {"ETag": '"v"', "Content-Length": length, "Connection": "close"}
        if asked:
            size = len(video) if total else "*"
            headers["Content-Range"] = f"bytes {start}-{start + len(some) - 1}/{size}"
        exchange.head(206 if asked else 200, **headers)
        exchange.wfile.write(some)
        exchange.close_connection = True

    with served(clip=answer) as web:
        whole, part = fetch(web.url("/clip"), web.url("/clip") + f"#0+{len(video)}")
        (short,) = fetch(web.url("/clip"), max_resumes=1)
    assert whole["video"] == video
    assert part["video"] == video
    assert "ended" in short["retry"]


def test_what_comes_instead_of_the_rest_of_a_file_is_judged_anew(video: bytes) -> None:
    def answer(exchange: Any) -> None:
        if exchange.number == 0:
            exchange.head(200, ETag='"v"', Content_Length=str(len(video) + 9000))
            exchange.wfile.write(video + bytes(8000))
            exchange.close_connection = True
        else:
            exchange.reply(200, b"<html>too many requests</html>")

    with served(clip=answer, good=content(video)) as web:
        row, good = fetch(web.url("/clip"), web.url("/good"))
    assert "web page" in row["drop"]
    assert good["video"] == video


def test_a_member_of_a_tar_is_a_byte_range(video: bytes) -> None:
    archive = bytes(512) + video + bytes(512)
    part = f"#512+{len(video)}"
    with served(shard=ranges(archive), old=content(archive)) as web:
        rows = fetch(web.url("/shard") + part, web.url("/old") + part, web.url("/shard") + "#512+999999")
        asked = [headers["Range"] for path, headers in web.asked if path == "/shard"]
        (far,) = fetch(web.url("/old") + f"#100000+{len(video)}", max_bytes=50_000)
    assert rows[0]["video"] == rows[1]["video"] == video  # a server that ignores ranges sends the whole file
    assert f"bytes=512-{511 + len(video)}" in asked
    assert "ends before" in rows[2]["drop"]
    assert "byte ranges" in far["drop"]


@pytest.mark.parametrize("code", [404, 403, 410, 204])
def test_permanent_errors_drop_a_clip(code: int) -> None:
    with served(clip=status(code)) as web:
        (row,) = fetch(web.url("/clip"))
    assert f"HTTP {code}" in row["drop"]
    assert row["retry"] is None


@pytest.mark.parametrize("code", [408, 429, 500, 503])
def test_temporary_errors_are_retried(code: int) -> None:
    with served(clip=status(code, Retry_After="30")) as web:
        (row,) = fetch(web.url("/clip"))
    assert f"HTTP {code}" in row["retry"]
    assert row["retry_after_s"] == 30
    assert row["drop"] is None


def test_a_host_decides_when_a_clip_is_tried_again(video: bytes, tmp_path: Path) -> None:
    times: list[float] = []

    def answer(exchange: Any) -> None:
        times.append(time.monotonic())
        exchange.reply(*((429, b"") if exchange.number == 0 else (200, video)), Retry_After="1")

    table = tmp_path / "clips.jsonl"
    with served(clip=answer) as web:
        table.write_text(f'{{"address": "{web.url("/clip")}", "text": "a clip"}}\n')
        stages = {"fetch": {"function": "", "settings": {"allow_private": True, "robots": "ignore"}}}
        run_flow(flow_config(tmp_path / "flow", table, stages))
    assert len(times) == 2
    assert times[1] - times[0] >= 0.95


def test_waits_double_and_have_a_limit() -> None:
    config = FlowConfig(retry_delay_s=2.0)
    assert [delay_s(config, delivery) for delivery in (1, 2, 3)] == [2, 4, 8]
    assert [delay_s(config, 1, asked_s) for asked_s in (1.0, 30.0, 1e18)] == [2, 30, MAX_DELAY_S]


def test_unreachable_hosts_are_retried(video: bytes) -> None:
    with served(clip=ranges(video[:100] + video, breaks_after=50)) as web:
        rows = fetch(NOBODY, "http://no-such-host.invalid/clip.mp4", web.url("/clip"), max_resumes=1)
    assert "127.0.0.1" in rows[0]["retry"]
    assert "no-such-host.invalid" in rows[1]["retry"]
    assert "connection" in rows[2]["retry"]


def test_content_is_judged_by_its_bytes(video: bytes) -> None:
    page = b"<!doctype html><html>not found</html>"
    with served(page=content(page, Content_Type="video/mp4"), empty=content(b""), clip=content(video)) as web:
        rows = fetch(web.url("/page"), web.url("/empty"), web.url("/clip"), formats=["matroska"])
    assert "web page" in rows[0]["drop"]
    assert "empty" in rows[1]["drop"]
    assert "mp4" in rows[2]["drop"]


def test_content_of_another_kind_is_not_read_to_its_end() -> None:
    with served(page=endless(b"<html>")) as web:
        (row,) = fetch(web.url("/page"))
    assert "web page" in row["drop"]


def test_limits_of_size_and_time(video: bytes) -> None:
    long = content(video + bytes(10**6))
    slow = drip(video[:64] + bytes(9000), 0.05)
    with served(endless=endless(video), long=long, slow=slow, loop=status(302, Location="/loop")) as web:
        rows = fetch(*(web.url(f"/{name}") for name in ("endless", "long", "loop")), max_bytes=500_000)
        (late,) = fetch(web.url("/slow"), timeout_s=0.4)
    assert "0.476837 MiB" in rows[0]["drop"]
    assert "0.476837 MiB" in rows[1]["drop"]
    assert "5 redirects" in rows[2]["drop"]
    assert "0.4 s" in late["retry"]


def test_wrong_addresses_are_dropped(tmp_path: Path) -> None:
    wrong = [
        "",
        None,
        "ftp://example.com/a.mp4",
        "simplecache::http://example.com/a",
        "http://[::1/a",
        "http://",
        "http://127.0.0.1:99999/a.mp4",
        "http://xn--/a.mp4",
        f"http://127.0.0.1:1/a.mp4#{'1' * 5000}+5",
    ]
    moved = {"port": status(302, Location="http://127.0.0.1:99999/"), "name": status(302, Location="//xn--/")}
    with served(file=status(302, Location="file:///etc/passwd"), **moved) as web:
        rows = fetch(*wrong, *map(web.url, ("/port", "/name", "/file")), root=str(tmp_path))
    assert all(row["drop"] for row in rows)
    assert "/etc/passwd" in rows[-1]["drop"]


def test_a_strange_answer_spoils_no_other_clip(video: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = "9" * 5000
    part = {"Content_Length": "1", "Content_Range": f"bytes {huge}-{huge}/{huge}"}
    pages = {"part": lambda exchange: exchange.head(206, **part), "clip": content(video),
             "long": lambda exchange: exchange.head(200, Content_Length=huge)}  # fmt: skip
    with served(**pages) as web:
        rows = fetch(web.url("/clip"), web.url("/part") + "#5+5", web.url("/long"))
        monkeypatch.setattr(Transfer, "_judge", lambda self: 1 // 0 if "part" in self.url.path else None)
        broken = fetch(web.url("/clip"), web.url("/clip?part"), web.url("/part"))
    assert rows[0]["video"] == video
    assert "range" in rows[1]["drop"]
    assert rows[2]["retry"]
    assert broken[0]["video"] == video


def test_a_header_of_links_takes_no_time() -> None:
    began = time.monotonic()
    assert licence_link(httpx.Headers({"link": "<" * 40_000})) is None
    assert time.monotonic() - began < 1


def test_rows_without_an_address_are_dropped_with_their_error() -> None:
    batch = pa.record_batch({"clip": ["a"], "address": [""], "error": ["row 7: it is not valid JSON"]})
    assert Fetch.make()(batch).column("drop").to_pylist() == ["row 7: it is not valid JSON"]


def test_robots_are_respected(video: bytes) -> None:
    rules = b"User-agent: worldmodel\nDisallow: /*.mp4$\n\nUser-agent: *\nDisallow: /\n"
    pages = {"robots.txt": content(rules), "a.mp4": content(video), "a": content(video),
             "art": content(video, X_Robots_Tag="all, noai")}  # fmt: skip
    with served(**pages) as web:
        urls = [web.url(f"/{name}") for name in ("a.mp4", "a", "art")]
        rows = fetch(*urls, robots="respect", user_agent="worldmodel/1 (me@example.com)")
        paths = [path for path, _ in web.asked]
        ignoring = fetch(*urls)
    assert "robots.txt" in rows[0]["drop"]
    assert (rows[1]["video"], rows[1]["robots"]) == (video, "allowed")
    assert "noai" in rows[2]["drop"]
    assert paths.count("/robots.txt") == 1
    assert "/a.mp4" not in paths
    assert [row["robots"] for row in ignoring] == ["ignored"] * 3


def test_a_host_without_rules_permits_and_one_in_trouble_is_asked_later(video: bytes) -> None:
    pages = {"clip": content(video)}
    with served(**pages) as free, served(**pages, **{"robots.txt": status(503)}) as busy:
        rows = fetch(free.url("/clip"), busy.url("/clip"), robots="respect")
    assert rows[0]["robots"] == "allowed"
    assert "robots.txt" in rows[1]["retry"]


def test_rules_that_drip_are_given_up_before_the_file_is(video: bytes) -> None:
    slow = {"clip": content(video), "robots.txt": drip(b"User-agent: *\n", 0.05)}
    with served(**slow) as web:
        (row,) = fetch(web.url("/clip"), robots="respect", timeout_s=1.0)
    assert "robots.txt" in row["retry"]
    assert "within 0.5 s" in row["retry"]


def test_rules_that_take_too_much_memory_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def read(url: httpx.URL, max_bytes: int) -> tuple[int, bytes]:
        asked.append(url.host)
        return 200, b"User-agent: *\nDisallow: /" + b"a" * 974

    async def check(hosts: str) -> int:
        rules = Robots(read, 1.0, "worldmodel")
        for host in hosts:
            await rules.check(httpx.URL(f"http://{host}/clip"))
        return len(rules.known)

    monkeypatch.setattr(robots, "MAX_KEPT_BYTES", 2500)
    assert asyncio.run(check("abacda")) == 3
    assert asked == [*"abcda"], "the first that was read is forgotten"


@pytest.fixture
def connected() -> list[str]:
    """IP addresses that were connected to."""
    return []


@pytest.fixture
def internet(monkeypatch: pytest.MonkeyPatch, connected: list[str]) -> dict[str, list[str]]:
    """Names resolve to the addresses of this table, and `PUBLIC_IP` leads to servers of this machine."""
    table: dict[str, list[str]] = {}
    resolve, connect = socket.getaddrinfo, httpcore.AnyIOBackend.connect_tcp

    def getaddrinfo(host: Any, port: Any, *args: Any, **more: Any) -> Any:
        if host not in table:
            return resolve(host, port, *args, **more)
        # A list of several entries: each request takes the next one, as in DNS rebinding.
        found = table[host].pop(0) if len(table[host]) > 1 else table[host][0]
        family = socket.AF_INET6 if ":" in found else socket.AF_INET
        return [(family, socket.SOCK_STREAM, 6, "", (found, port))]

    async def connect_tcp(self: Any, host: str, *args: Any, **more: Any) -> Any:
        connected.append(host)
        return await connect(self, "127.0.0.1" if host == PUBLIC_IP else host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", connect_tcp)
    return table


def test_private_addresses_are_never_connected_to(
    internet: dict[str, list[str]], connected: list[str], video: bytes
) -> None:
    internet |= {"good.test": [PUBLIC_IP], "evil.test": ["127.0.0.1"], "meta.test": ["169.254.169.254"]}
    internet["six.test"] = ["::ffff:127.0.0.1"]
    with served(clip=content(video)) as secret, served() as web:
        web.pages = {"/clip": content(video)}
        web.pages["/inside"] = status(302, Location=secret.url("/clip"))
        web.pages["/named"] = status(307, Location=secret.url("/clip", "evil.test"))
        web.pages["/decimal"] = status(301, Location=secret.url("/clip", "2130706433"))
        bad = [
            *(web.url(f"/{name}", "good.test") for name in ("inside", "named", "decimal")),
            *(
                secret.url("/clip", host)
                for host in ("127.0.0.1", "evil.test", "six.test", "[::1]", "localhost")
            ),
            *(secret.url("/clip", host) for host in ("0.0.0.0", "0x7f.1", "[::ffff:7f00:1]")),
            "http://meta.test/latest/meta-data",
        ]
        rows = fetch(web.url("/clip", "good.test"), *bad, allow_private=False)
        assert {*connected} == {PUBLIC_IP}
        assert secret.asked == []
        allowed = fetch(secret.url("/clip"))
    assert rows[0]["video"] == video
    assert [row["drop"] is not None and "public" in row["drop"] for row in rows[1:]] == [True] * len(bad)
    assert allowed[0]["video"] == video


def test_networks_that_are_trusted_are_permitted_and_no_others(
    internet: dict[str, list[str]], connected: list[str], video: bytes
) -> None:
    internet |= {"meta.test": ["169.254.169.254"], "mapped.test": ["::ffff:127.0.0.1"]}
    with served() as mirror:
        mirror.pages = {"/clip": content(video), "/away": status(302, Location="http://meta.test/latest")}
        elsewhere = [mirror.url("/away"), "http://192.168.1.1/", mirror.url("/clip", "mapped.test")]
        rows = fetch(mirror.url("/clip"), *elsewhere, allow_private=["127.0.0.0/8", "fd00::/8"])
        (alone,) = fetch(mirror.url("/clip"), allow_private="127.0.0.1")
        (other,) = fetch(mirror.url("/clip"), allow_private=["10.0.0.0/8"])
    assert rows[0]["video"] == alone["video"] == video
    assert all("not a public address" in row["drop"] for row in [*rows[1:], other])
    assert {*connected} == {"127.0.0.1"}, "a redirect of the mirror leads nowhere else"


def test_a_name_that_resolves_differently_the_next_time_gains_nothing(
    internet: dict[str, list[str]], video: bytes
) -> None:
    internet["rebinding.test"] = [PUBLIC_IP, "127.0.0.1"]

    def close(exchange: Any) -> None:
        exchange.close_connection = True
        exchange.reply(302, Location=exchange.server.url("/clip", "rebinding.test"), Connection="close")

    with served(first=close, clip=content(video)) as web:
        (row,) = fetch(web.url("/first", "rebinding.test"), allow_private=False)
        paths = [path for path, _ in web.asked]
    assert "127.0.0.1" in row["drop"]
    assert paths == ["/first"]


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch, video: bytes) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with served(clip=content(video)) as web:
        (row,) = fetch(web.url("/clip"))
    assert row["video"] == video


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *(("8.8.8.8", True), ("10.1.2.3", False), ("172.16.0.1", False), ("192.168.1.1", False)),
        *(("127.8.8.8", False), ("169.254.169.254", False), ("100.64.0.1", False), ("224.0.0.1", False)),
        *(("0.0.0.0", False), ("255.255.255.255", False), ("198.18.0.1", False), ("240.0.0.1", False)),
        *(("2606:4700::1111", True), ("::1", False), ("::", False), ("fe80::1", False), ("fc00::1", False)),
        *(("fec0::1", False), ("ff02::1", False), ("2001:db8::1", False), ("::127.0.0.1", False)),
        *(("::ffff:10.0.0.1", False), ("::ffff:8.8.8.8", True), ("2002:7f00:1::", False)),
        *(("64:ff9b::7f00:1", False), ("64:ff9b::808:808", True), ("fe80::1%eth0", False)),
    ],
)  # fmt: skip
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is public


def test_local_files_are_read_inside_of_the_root_only(video: bytes, tmp_path: Path) -> None:
    root, secret = tmp_path / "root", tmp_path / "secret.mp4"
    root.mkdir()
    (root / "clip.mp4").write_bytes(video)
    secret.write_bytes(video)
    (root / "link.mp4").symlink_to(secret)
    inside = ["clip.mp4", str(root / "clip.mp4"), f"file://{root}/clip.mp4", f"clip.mp4#0+{len(video)}"]
    outside = ["../secret.mp4", str(secret), "link.mp4", ".", "gone.mp4", f"clip.mp4#9+{len(video)}"]
    rows = fetch(*inside, *outside, root=str(root))
    assert [row["video"] for row in rows[:4]] == [video] * 4
    assert all(row["drop"] for row in rows[4:])
    assert "root" in fetch("clip.mp4")[0]["drop"]
    assert "larger" in fetch("clip.mp4", root=str(root), max_bytes=100)[0]["drop"]


def test_one_worker_fetches_batches_one_after_another(video: bytes) -> None:
    worker = Fetch.make(allow_private=True, robots="respect")
    with served(clip=content(video)) as web:
        batch = pa.record_batch({"clip": ["a"], "address": [web.url("/clip")]})
        assert [worker(batch).column("num_bytes")[0].as_py() for _ in range(3)] == [len(video)] * 3
        assert [path for path, _ in web.asked].count("/robots.txt") == 1


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="flv"):
        Fetch.make(formats=["flv"])
    with pytest.raises(ConfigError, match="-1"):
        Fetch.make(max_bytes=-1)
    for networks in (["10.0.0.0/8", "10.1.2.3/16"], ["internal"], "yes"):
        with pytest.raises(ConfigError, match="allow_private"):
            Fetch.make(allow_private=networks)
    with pytest.raises(ConfigError, match="maybe"):
        Fetch.make(robots="maybe")
    with pytest.raises(ConfigError, match="fetsch"):
        find_stage("fetsch")
    with pytest.raises(ConfigError, match="no_such_module"):
        find_stage("no_such_module:stage")
