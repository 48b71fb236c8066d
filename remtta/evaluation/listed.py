"""Labelled images from a list: a path and a class per line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from remtta.errors import UsageError
from remtta.evaluation.domains import Domain, load_at


def listed_domain(file: Path, root: Path, num_classes: int, names: Sequence[str] | None, limit: int | None) -> Domain:
    """The images of a list, or its first `limit`, as one domain in their order.

    Args:
        file: A line `path<TAB>class` or `path,class` per image, the class as a number or a name.
        root: What relative paths are relative to.
        num_classes: Classes of the model.
        names: The model's class names.
        limit: At most so many images.

    Raises:
        UsageError: If the file cannot be read, an image is missing, or a class is unknown.
    """
    entries = _entries(file)[:limit]
    counts = Counter(names)
    numbers = {name: number for number, name in enumerate(names or ()) if counts[name] == 1}
    labels = [int(label) if label.isdecimal() else numbers.get(label, -1) for _, label in entries]
    for (_, text), label in zip(entries, labels, strict=True):
        if not 0 <= label < num_classes:
            raise UsageError(f'--labels-file: {file}: the model has no class "{text}"; it has {num_classes} classes')
    sources = [str(root / image) for image, _ in entries]
    missing = [source for source in sources if not Path(source).is_file()]
    if missing:
        raise UsageError(f"--labels-file: {len(missing)} images of {file} are missing, such as {missing[0]}")
    return Domain(file.stem, None, sources, np.array(labels, dtype=np.int64), partial(load_at, sources))


def _entries(file: Path) -> list[tuple[str, str]]:
    """Path and class of each line."""
    try:
        text = file.read_text(encoding="utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise UsageError(f"--labels-file: {file} cannot be read: {error.strerror}") from error
    entries = [line.partition("\t" if "\t" in line else ",") for line in text.split("\n") if line.strip()]
    bad = next((image for image, _, label in entries if not (image.strip() and label.strip())), None)
    if bad is not None or not entries:
        raise UsageError(f'--labels-file: {file} needs lines such as frames/1.png,3, got "{bad or ""}"')
    return [(image.strip(), label.strip()) for image, _, label in entries]
