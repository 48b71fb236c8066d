"""Models in other formats: ONNX files, transformers' folders, exports."""
