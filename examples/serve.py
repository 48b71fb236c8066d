"""A classifier over HTTP that adapts to what it receives: `pip install "fastapi[standard]"`, `fastapi run serve.py`.

`curl -F images=@a.jpg -F images=@b.jpg localhost:8000/predict` sends a batch: send several images at a time. FastAPI
runs each request in a thread; they share one `Adapter`, which works for one of them at a time. Each of several
`--workers` would have a model that learns from its part only. What anybody sends changes the model: have a proxy in
front ask for a password, and bound the size and the number of requests.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from fastapi import FastAPI, HTTPException, Request, UploadFile
from PIL import Image, ImageOps

from remtta import Adapter, load_model

MODEL, BATCH_SIZE, STATE = "vit_base_patch16_224", 8, Path("state.pt")
FORMATS = ("JPEG", "PNG", "WEBP")  # with EPS among them, uploads would be run by Ghostscript
Image.MAX_IMAGE_PIXELS = 25_000_000  # Pillow refuses images of twice as many


@asynccontextmanager
async def served(app: FastAPI) -> AsyncIterator[None]:
    app.state.adapter = Adapter(load_model(MODEL), batch_size=BATCH_SIZE)
    if STATE.exists():  # go on from where the last service was
        app.state.adapter.load_state_dict(torch.load(STATE, weights_only=True))
    yield
    torch.save(app.state.adapter.state_dict(), STATE)


app = FastAPI(lifespan=served)


@app.post("/predict")
def predict(images: list[UploadFile], request: Request) -> list[dict[str, int | float]]:
    try:
        pictures = [ImageOps.exif_transpose(Image.open(image.file, formats=FORMATS)) for image in images]
    except Exception as error:  # Pillow raises many types on damaged data
        raise HTTPException(422, f"no image: {error}") from error
    best = request.app.state.adapter(pictures).max(-1)  # predicts, then learns
    return [{"class": int(number), "prob": float(prob)} for prob, number in zip(*best, strict=True)]
