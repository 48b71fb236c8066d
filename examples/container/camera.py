"""A simulated camera: shows a folder's images in a loop, as MJPEG over HTTP. `camera.py FOLDER PORT [RATE]`"""

from __future__ import annotations

import contextlib
import http.server
import io
import sys
import time
from pathlib import Path

from PIL import Image


def jpegs(folder: Path) -> list[bytes]:
    """Return the PNG images of a folder and its subfolders, sorted by name, as JPEGs.

    Raises:
        SystemExit: If there are none.
    """
    found = []
    for path in sorted(folder.rglob("*.png")):
        file = io.BytesIO()
        Image.open(path).convert("RGB").save(file, "jpeg", quality=95)
        found.append(file.getvalue())
    if not found:
        sys.exit(f"{folder} has no .png")
    return found


def server(pictures: list[bytes], port: int, rate: float) -> http.server.ThreadingHTTPServer:
    """Return a server that sends every client the current image, at a fixed rate."""
    started = time.monotonic()

    class Camera(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # whoever has seen enough hangs up
                while True:
                    now = (time.monotonic() - started) * rate
                    jpeg = pictures[int(now) % len(pictures)]
                    head = f"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: {len(jpeg)}\r\n\r\n"
                    self.wfile.write(head.encode() + jpeg + b"\r\n")
                    time.sleep((1 - now % 1) / rate)

        def log_message(self, *_: object) -> None:
            """Suppress logging."""

    return http.server.ThreadingHTTPServer(("", port), Camera)


if __name__ == "__main__":
    folder, port, *rates = sys.argv[1:]
    server(jpegs(Path(folder)), int(port), float(rates[0]) if rates else 10.0).serve_forever()
