"""Sources over http, from a local server whose first answers fail."""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
from data_helpers import digest, make_order, make_units, one_pass, parquet_data, take, write_parquet

from recipes.data.source import scan_source
from recipes.data.tokens import Encoder


class Flaky(http.server.SimpleHTTPRequestHandler):
    """Serves a folder with range requests; answers 503 as long as `failures` is positive."""

    failures = 0
    refused = 0

    def do_GET(self) -> None:
        if type(self).failures > 0:
            type(self).failures -= 1
            type(self).refused += 1
            self.send_error(503)
            return
        body = Path(self.translate_path(self.path)).read_bytes()
        start, end, status = 0, len(body) - 1, 200
        if match := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end, status = int(match[1]), min(int(match[2] or end), end), 206
        self.send_response(status)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Range", f"bytes {start}-{end}/{len(body)}")
        self.send_header("Content-Length", str(end - start + 1))
        self.end_headers()
        self.wfile.write(body[start : end + 1])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    Flaky.failures = Flaky.refused = 0
    handler = partial(Flaky, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_files_over_http_survive_a_flaky_server(
    tmp_path: Path, encoder: Encoder, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One attempt inside `datasets` each, so that our own retries are what is tested.
    for name in ("STREAMING_READ_MAX_RETRIES", "STREAMING_OPEN_MAX_RETRIES"):
        monkeypatch.setattr(datasets.config, name, 1)
    monkeypatch.setattr(datasets.config, "STREAMING_READ_RETRY_INTERVAL", 0)
    documents = write_parquet(tmp_path, files=2, rows=12, group=6)
    local = make_units(parquet_data(tmp_path))
    urls = [f"{server}/part-{f}.parquet" for f in range(2)]
    units = make_units(parquet_data(tmp_path, files=urls))
    assert one_pass(units) == documents
    order = make_order(read_attempts=5)
    want = take(local, encoder, order, 20)
    Flaky.failures = 3
    assert digest(take(units, encoder, order, 20)) == digest(want)
    assert Flaky.refused == 3
    Flaky.failures = 10**6
    with pytest.raises(ValueError, match=r"part-\d.parquet, row group \d: can't be read"):
        take(units, encoder, make_order(), 20)


def test_http_without_its_client_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise ImportError('HTTPFileSystem requires "requests" and "aiohttp" to be installed')

    monkeypatch.setattr(datasets, "load_dataset_builder", missing)
    data = parquet_data(Path("/nowhere"), files=["http://127.0.0.1:9/a.parquet"])
    with pytest.raises(ValueError, match="aiohttp.*install what it names"):
        scan_source(data, seed=7)
