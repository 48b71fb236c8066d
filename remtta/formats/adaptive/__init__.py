"""ONNX files that adapt themselves: a classifier, and the arithmetic of the method `fast`, in standard operators."""
