"""COME: entropy minimisation with an entropy that includes uncertainty (Zhang et al., ICLR 2025, arXiv:2410.10894).

Wherever the host method uses entropy (loss, filter, weight, collapse, ranking), `come_entropy` takes its place, which
also accounts for how little evidence the logits contain.
"""

from __future__ import annotations

from remtta.baselines.eata import EATA
from remtta.baselines.losses import come_entropy
from remtta.baselines.sar import SAR
from remtta.methods.rem import REM
from remtta.methods.tent import Tent


class _COME:
    entropy = staticmethod(come_entropy)


class TentCOME(_COME, Tent):
    """Tent with COME's entropy."""


class EATACOME(_COME, EATA):
    """EATA with COME's entropy, also in its filter and weights."""


class SARCOME(_COME, SAR):
    """SAR with COME's entropy, also in its filter and collapse check."""


class REMCOME(_COME, REM):
    """REM with views ranked by COME's entropy; the consistency loss is unchanged."""
