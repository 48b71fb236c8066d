"""Predict images (N, 3, H, W) of a .npy file in batches with a file that adapts itself, in OpenVINO, into another."""

import sys

import numpy as np
import openvino

file, images, size, output = sys.argv[1:]
model = openvino.Core().compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
state, found = np.zeros(tuple(model.input("state").shape), np.float32), []
for start in range(0, len(np.load(images)), int(size)):
    logits, state, status = model({"images": np.load(images)[start : start + int(size)], "state": state}).values()
    found.append(logits.copy())
np.save(output, np.concatenate(found))
