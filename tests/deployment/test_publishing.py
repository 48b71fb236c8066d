"""Published models, also where `remtta.formats` is not installed."""

from pathlib import Path

import pytest

from remtta import extensions, load_delta
from remtta.deployment.publishing import ModelPublisher
from remtta.errors import UsageError
from tests.conftest import same_tensors
from tests.runs.tiny import adapt_tiny


def test_without_formats_only_onnx_is_refused(frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "_exists", lambda target: not target.startswith("remtta.formats"))
    for name in ("live.onnx", "models"):
        with pytest.raises(UsageError, match=f"--publish .*{name} needs remtta.formats, a part"):
            adapt_tiny(frames, tmp_path / "refused", callbacks=[ModelPublisher(tmp_path / name)])
        assert not (tmp_path / "refused").exists()
    path = tmp_path / "delta.safetensors"
    adapt_tiny(frames, tmp_path / "run", callbacks=[ModelPublisher(path, "1")])
    assert same_tensors(load_delta(path).tensors, load_delta(tmp_path / "run").tensors)
