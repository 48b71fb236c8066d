"""Text towers of open_clip: from sentences to embeddings, computed once and cached on disk."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from remtta.errors import OutputError
from remtta.files import cache_folder
from remtta.models.tensor_files import UNREADABLE, read_tensors, save_tensors, state_sha256
from remtta.options.loaders import OnTexts
from remtta.zero_shot.prompts import filled

if TYPE_CHECKING:
    from open_clip.model import CLIP

Tokenizer = Callable[[list[str]], Tensor]
"""A function from sentences to token numbers (N, context)."""

_BATCH = 256  # sentences
_EMBEDDINGS = "embeddings"

_log = logging.getLogger(__name__)


class TextTower:
    """The text half of an open_clip model, which is not part of the image model's state and parameters.

    `on_texts` is called with the progress.
    """

    def __init__(self, model: CLIP, tokenizer: Tokenizer, on_texts: OnTexts | None) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.sha256 = state_sha256(model)
        self._on_texts = on_texts

    @property
    def device(self) -> torch.device:
        """The device of its weights."""
        return next(self.model.parameters()).device

    @torch.no_grad()
    def encode(self, sentences: Sequence[str]) -> Tensor:
        """Return the normalised embeddings (N, E)."""
        return self.of_tokens(self.tokens(sentences))

    def tokens(self, sentences: Sequence[str]) -> Tensor:
        """Return token numbers (N, context)."""
        return self.tokenizer(list(sentences)).to(self.device)

    def of_tokens(self, tokens: Tensor) -> Tensor:
        """Return the embeddings (N, E) of token numbers (N, context), with gradient.

        Each batch of many sentences is recomputed in the backward pass, so that only one's graph is held.
        """
        if len(tokens) <= _BATCH:
            return self._embed(tokens)
        return torch.cat([checkpoint(self._embed, part, use_reentrant=False) for part in tokens.split(_BATCH)])

    @property
    def words(self) -> nn.Embedding:
        """The layer that embeds tokens: the embedding with the most rows."""
        embeddings = (module for module in self.model.modules() if isinstance(module, nn.Embedding))
        return max(embeddings, key=lambda module: module.num_embeddings)

    @contextlib.contextmanager
    def with_words(self, vectors: Tensor, start: int) -> Iterator[None]:
        """Replace every sentence's words from position `start` on by vectors (N, D), within the block."""
        end = start + len(vectors)

        def replaced(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
            return torch.cat([output[:, :start], vectors.expand(len(output), -1, -1), output[:, end:]], dim=1)

        with self.words.register_forward_hook(replaced):
            yield

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.model.encode_text(tokens, normalize=True).float()

    def texts_sha256(self, names: Sequence[str], templates: Sequence[str]) -> bytes:
        """Return the hash of everything that embeddings depend on: weights, tokenizer, names, templates."""
        content = (self.sha256, type(self.tokenizer).__name__, tuple(names), tuple(templates))
        return hashlib.sha256(repr(content).encode()).digest()

    def of_classes(self, names: Sequence[str], templates: Sequence[str]) -> Tensor:
        """Return a normalised embedding (C, E) per class, averaged over the templates."""
        return self._cached("mean", names, templates, lambda embeddings: F.normalize(embeddings.mean(1), dim=-1))

    def of_templates(self, names: Sequence[str], templates: Sequence[str]) -> Tensor:
        """Return the embeddings (T, C, E) of each template separately."""
        return self._cached("each", names, templates, lambda embeddings: embeddings).transpose(0, 1).contiguous()

    def _cached(
        self, suffix: str, names: Sequence[str], templates: Sequence[str], reduce: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the result of `reduce` for the embeddings (C', T, E) of some classes at a time, cached on disk."""
        tokens = self.tokens([filled(templates[0], name) for name in names]).tolist()
        content = self.texts_sha256(names, templates), repr(self.model), tokens  # equal weights can have other layers
        key = hashlib.sha256(repr(content).encode()).hexdigest()
        path = cache_folder() / "text-embeddings" / f"{key}-{suffix}.safetensors"
        if path.is_file():
            try:
                return read_tensors(path)[1][_EMBEDDINGS].to(self.device)
            except (*UNREADABLE, KeyError) as error:
                _log.debug("%s is damaged and computed again: %s", path, error)
        num_names, parts = max(1, _BATCH // len(templates)), []
        for start in range(0, len(names), num_names):
            batch = names[start : start + num_names]
            sentences = [filled(template, name) for name in batch for template in templates]
            parts.append(reduce(self.encode(sentences).unflatten(0, (len(batch), len(templates)))))
            if self._on_texts is not None:
                self._on_texts((start + len(batch)) * len(templates), len(names) * len(templates))
        embeddings = torch.cat(parts)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_tensors(path, {_EMBEDDINGS: embeddings.cpu()}, {})
        except (OSError, OutputError) as error:  # only a cache
            _log.debug("text embeddings cannot be cached: %s", error)
        return embeddings
