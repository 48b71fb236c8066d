"""Local servers: of web pages, and a camera that serves MJPEG by RTSP over TCP."""

import contextlib
import http.client
import http.server
import socketserver
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import cv2
import numpy as np
from PIL import Image

_SDP = "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=-\r\nt=0 0\r\n{}m=video 0 RTP/AVP 26\r\na=control:0\r\n"
_TICKS = 1800  # of 90 kHz: 50 frames per second
_ANSWERS = {
    "OPTIONS": "Public: DESCRIBE, SETUP, PLAY\r\n",
    "DESCRIBE": "Content-Type: application/sdp\r\n",
    "SETUP": "Transport: RTP/AVP/TCP;unicast;interleaved=0-1\r\nSession: 1\r\n",
    "PLAY": "Session: 1\r\n",
}


class QuietHandler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def serving(handler: type[QuietHandler]) -> Iterator[Any]:
    """Yield a server at `server.server_port` of 127.0.0.1, in its own thread."""
    with in_thread(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        yield server


@contextlib.contextmanager
def in_thread(server: socketserver.BaseServer) -> Iterator[Any]:
    """Yield the server while it runs in its own thread."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Camera(socketserver.StreamRequestHandler):
    """Answers requests until PLAY, sends the server's frames, and disconnects; at once after `most` connections.

    Implements the parts of RFC 2326, 2435 and 3550 that FFmpeg uses.
    """

    def handle(self) -> None:
        server: Any = self.server
        with contextlib.suppress(OSError):  # hung up
            while server.played < server.most and (request := self.rfile.readline().decode()):
                method = request.partition(" ")[0]
                sequence = http.client.parse_headers(self.rfile)["CSeq"]
                status, body = ("200 OK", "") if method != "DESCRIBE" else (server.status, server.sdp)
                more = _ANSWERS[method]
                head = f"RTSP/1.0 {status}\r\nCSeq:{sequence}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
                self.wfile.write((head + body).encode())
                if method == "PLAY":
                    server.played += 1
                    self._play(server.frames)
                    return

    def _play(self, frames: Sequence[Image.Image]) -> None:
        for number, frame in enumerate(frames):
            content = _payload(np.asarray(frame))
            packet = struct.pack(">BBHII", 0x80, 0x80 | 26, number, number * _TICKS, 1) + content
            self.wfile.write(b"$\0" + struct.pack(">H", len(packet)) + packet)
            time.sleep(0.02)


def _payload(pixels: np.ndarray) -> bytes:
    """Return a JPEG without the parts that RFC 2435 omits; its sides are multiples of 16, and it fits into one
    packet.
    """
    jpeg = cv2.imencode(".jpg", pixels[..., ::-1])[1].tobytes()
    tables, position = b"", 2
    while (marker := jpeg[position + 1]) != 0xDA:  # up to the scan
        length = int.from_bytes(jpeg[position + 2 : position + 4])
        tables += jpeg[position + 5 : position + 2 + length] if marker == 0xDB else b""
        position += 2 + length
    scan = jpeg[position + 2 + int.from_bytes(jpeg[position + 2 : position + 4]) : -2]
    height, width = pixels.shape[:2]
    head = struct.pack(">IBBBBBBH", 0, 1, 255, width // 8, height // 8, 0, 0, len(tables))  # 4:2:0, tables inside
    return head + tables + scan


@contextlib.contextmanager
def rtsp_camera(frames: Sequence[Image.Image], seconds: float | None = None, status: str = "200 OK") -> Iterator[Any]:
    """Yield a camera at `server.url`, which gives these frames to each of the first `server.most` clients; with
    `seconds`, they are of a recording of this length. `status` is the answer to who asks what there is.
    """
    server: Any = socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Camera)
    server.daemon_threads, server.frames, server.played, server.most = True, frames, 0, 1
    server.status, server.sdp = status, _SDP.format("" if seconds is None else f"a=range:npt=0-{seconds}\r\n")
    server.url = f"rtsp://127.0.0.1:{server.server_address[1]}/live"
    with in_thread(server):
        yield server
