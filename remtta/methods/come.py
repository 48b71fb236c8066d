"""COME: methods of entropy minimisation with a more careful entropy (Zhang et al., ICLR 2025, arXiv:2410.10894).

Wherever the host method speaks of entropy (loss, filter, weight, collapse, ranking)
it is `come_entropy` here, which also counts how little the logits are evidence of.
"""

from __future__ import annotations

from remtta.methods.eata import EATA
from remtta.methods.losses import come_entropy
from remtta.methods.rem import RankedEntropy
from remtta.methods.sar import SAR
from remtta.methods.tent import Tent


class _COME:
    entropy = staticmethod(come_entropy)


class TentCOME(_COME, Tent):
    """Tent on COME's entropy."""


class EATACOME(_COME, EATA):
    """EATA on COME's entropy, whose filter and weights go by it as well."""


class SARCOME(_COME, SAR):
    """SAR on COME's entropy, whose filter and collapse check go by it as well."""


class REMCOME(_COME, RankedEntropy):
    """REM whose views are ranked by COME's entropy; the consistency loss is unchanged."""
