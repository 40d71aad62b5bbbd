from __future__ import annotations

import json
import socket
import threading

import pytest

from tests.bench.wire_headers import _RECEIVE_BYTES, HeaderClient


def answer(number: int, body_bytes: int) -> bytes:
    header = json.dumps({"code": 0, "opaque": number}).encode()
    length = 4 + len(header) + body_bytes
    return length.to_bytes(4, "big") + len(header).to_bytes(4, "big") + header + bytes(body_bytes)


def test_bodies_of_any_size_are_skipped() -> None:
    sizes = [0, 1, _RECEIVE_BYTES - 60, _RECEIVE_BYTES, 5, 3 * _RECEIVE_BYTES + 1, *range(200)]
    data = b"".join(answer(number, size) for number, size in enumerate(sizes))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = HeaderClient(f"127.0.0.1:{listener.getsockname()[1]}")
        peer, _ = listener.accept()
        sending = threading.Thread(target=peer.sendall, args=(data,))
        sending.start()
        with client:
            assert [client.answer()["opaque"] for _ in sizes] == list(range(len(sizes)))
            sending.join()
            peer.close()
            with pytest.raises(ConnectionResetError, match="closed a connection"):
                client.answer()
