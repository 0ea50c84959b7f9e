"""Models by the names of other programs: stores of Ollama and LM Studio, and .gguf files of a hub."""

from __future__ import annotations

import hashlib
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tot.decoders.errors import ModelError
from tot.decoders.models.model_names import find_model, list_models
from tot.decoders.models.stores import choose

DATA = b"GGUF"
FILE = b"GGUF" + bytes(24_000_000)
"""A file on the hub, which is downloaded in pieces of 10 MB."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    return tmp_path


def put_ollama(home: Path, place: str, data: bytes = DATA) -> Path:
    """Write a model to Ollama's store, as `ollama pull` does."""
    store, digest = home / ".ollama" / "models", hashlib.sha256(data).hexdigest()
    blob, manifest = store / "blobs" / f"sha256-{digest}", store / "manifests" / place
    for path in (blob, manifest):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": len(data)}
    template = {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:0", "size": 3}
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": [template, layer]}))
    return blob


def put_lm_studio(home: Path, *files: str) -> list[Path]:
    paths = [home / ".lmstudio" / "models" / file for file in files]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(DATA)
    return paths


@pytest.mark.parametrize(
    ("place", "names"),
    [
        ("registry.ollama.ai/library/llama3.2/latest", ["llama3.2", "llama3.2:latest"]),
        ("registry.ollama.ai/library/qwen2.5/0.5b", ["qwen2.5:0.5b"]),
        ("registry.ollama.ai/someone/model/q4", ["someone/model:q4"]),
        ("hf.co/org/name-GGUF/Q4_K_M", ["hf.co/org/name-GGUF:Q4_K_M", "https://huggingface.co/org/name-GGUF:Q4_K_M"]),
    ],
)
def test_a_model_of_ollama_is_found_by_its_name_and_read_in_place(home: Path, place: str, names: list[str]) -> None:
    blob = put_ollama(home, place)
    assert {find_model(name) for name in names} == {blob}
    assert [entry.name for entry in list_models() if entry.kind == "Ollama"] == names[-1:] or names[0] != names[-1]


def test_models_of_lm_studio_are_found_by_repository_format_and_file(home: Path) -> None:
    q4, q8 = put_lm_studio(home, "org/name-GGUF/name-Q4_K_M.gguf", "org/name-GGUF/name-Q8_0.gguf")
    put_lm_studio(home, "org/name-GGUF/mmproj-name-F16.gguf")
    assert find_model("org/name-GGUF") == q4
    assert find_model("org/name-GGUF:q8_0") == find_model("org/name-GGUF/name-Q8_0.gguf") == q8
    with pytest.raises(ModelError, match=r"unknown file of org/name-GGUF 'Q2_K'.*Q4_K_M, Q8_0"):
        find_model("org/name-GGUF:Q2_K")
    assert [entry.name for entry in list_models() if entry.kind == "LM Studio"] == [
        "org/name-GGUF/name-Q4_K_M.gguf",
        "org/name-GGUF/name-Q8_0.gguf",
    ]


def test_a_name_that_matches_several_files_lists_them() -> None:
    with pytest.raises(ModelError, match=r"org/x:Q4_0 is 2 files \(a-Q4_0.gguf, b-Q4_0.gguf\): name one"):
        choose({"a-Q4_0.gguf": 1, "b-Q4_0.gguf": 1}, "org/x", "Q4_0")


def test_the_usual_format_that_fits_is_chosen_and_parts_count_together() -> None:
    parts = {f"x-Q4_K_M-0000{number}-of-00002.gguf": 60 for number in (1, 2)}
    files = {**parts, "x-Q8_0.gguf": 110, "x-Q2_K.gguf": 40}
    assert choose(files, "org/x", None, 200) == "x-Q4_K_M-00001-of-00002.gguf"
    assert choose(files, "org/x", None, 60) == "x-Q2_K.gguf"
    with pytest.raises(ModelError, match=r"no file of org/x fits: x-Q2_K.gguf takes"):
        choose(files, "org/x", None, 30)


def test_damaged_stores_are_skipped_and_unknown_names_list_the_installed_ones(home: Path) -> None:
    put_ollama(home, "registry.ollama.ai/library/good/latest")
    for name, text in {"a": "{", "b": "[]", "c": '{"layers": [{"mediaType": "x"}]}'}.items():
        path = home / f".ollama/models/manifests/registry.ollama.ai/library/{name}/latest"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    evil = home / ".ollama/models/manifests/registry.ollama.ai/library/evil/latest"
    evil.parent.mkdir(parents=True)
    evil.write_text('{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "../../../secret"}]}')
    (home / "secret").write_bytes(DATA)
    with pytest.raises(ModelError, match=r"unknown model 'evil'.*good:latest"):
        find_model("evil")


class Hub(BaseHTTPRequestHandler):
    """A hub with one repository; the first download of a file is cut after half of its bytes."""

    protocol_version = "HTTP/1.1"
    ranges: list[str | None]

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._reply(False)

    def do_GET(self) -> None:
        self._reply(True)

    def _reply(self, body: bool) -> None:
        if "private" in self.path:
            self._send(401, b"{}", {"x-error-code": "GatedRepo"}, body)
        elif self.path.startswith("/api/models/"):
            files = [{"rfilename": f"x-{kind}.gguf", "size": len(FILE)} for kind in ("Q4_K_M", "Q8_0")]
            self._send(200, json.dumps({"id": "org/x", "sha": "1" * 40, "siblings": files}).encode(), {}, body)
        elif "/resolve/" in self.path:
            about = {"etag": '"abc"', "x-repo-commit": "1" * 40}
            if not body:
                self._send(200, FILE, about, body)
                return
            wanted = self.headers.get("range")
            self.ranges.append(wanted)
            if wanted is None and "Q8_0" in self.path:
                self._send(200, FILE, about, body)
                return
            if wanted is None:
                self._send(200, FILE, about, False)
                self.wfile.write(FILE[: len(FILE) // 2])
                self.close_connection = True
                return
            first = int(wanted.removeprefix("bytes=").partition("-")[0])
            about["content-range"] = f"bytes {first}-{len(FILE) - 1}/{len(FILE)}"
            self._send(206, FILE[first:], about, body)
        else:
            self._send(404, b"{}", {}, body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    Hub.ranges = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def pulled(
    hub: ThreadingHTTPServer, tmp_path: Path, run_python: Callable[..., subprocess.Popen[str]]
) -> Callable[..., tuple[str, str]]:
    """Return a function that runs `tot pull` against the hub, after other code."""

    def pull(name: str, before: str = "") -> tuple[str, str]:
        environment = {
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}",
            "HF_HOME": str(tmp_path / "hf"),
            "HOME": str(tmp_path),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        code = f"import sys\nfrom tot.cli.app import main\n{before}\nsys.exit(main(['pull', '{name}']))"
        return run_python(code, **environment).communicate(timeout=120)

    return pull


@pytest.mark.processes
def test_pull_downloads_the_file_that_fits_and_resumes_after_a_cut(pulled: Any, tmp_path: Path) -> None:
    out, err = pulled("org/x")
    assert "org/x: downloading x-Q4_K_M.gguf" in err
    assert "1 other files: add :FORMAT" in err
    path = Path(out.removeprefix("org/x: ").strip())
    assert path.name == "x-Q4_K_M.gguf"
    assert path.read_bytes() == FILE
    assert Hub.ranges[0] is None
    assert any(one is not None and int(one.removeprefix("bytes=").partition("-")[0]) > 0 for one in Hub.ranges[1:])
    count = len(Hub.ranges)
    assert pulled("hf.co/org/x:Q4_K_M") == (f"hf.co/org/x:Q4_K_M: {path}\n", "")  # needs no download
    assert len(Hub.ranges) == count


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "before", "message"),
    [
        ("org/x:Q2_K", "", "unknown file of org/x 'Q2_K' (did you mean Q4_K_M?): choose one of Q4_K_M, Q8_0"),
        ("org/private", "", "for a private or gated model, run `hf auth login` or set HF_TOKEN"),
        (
            "org/x:Q8_0",
            "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))",
            "org/x can't be downloaded from the hub (",
        ),
    ],
)
def test_a_failed_pull_is_one_line(pulled: Any, name: str, before: str, message: str) -> None:
    out, err = pulled(name, before)
    lines = [line for line in err.splitlines() if "downloading" not in line]
    assert out == ""
    assert len(lines) == 1
    assert lines[0].startswith("tot: ")
    assert message in lines[0]
