"""The published methods that REM is compared with, as published. Imports no torch."""

from __future__ import annotations

from remtta.methods.settings.base import PUBLISHED
from remtta.methods.settings.core import MethodSpec
from remtta.methods.settings.rem_config import REMConfig

METHODS: dict[str, MethodSpec] = {
    "neo": MethodSpec(
        "remtta.baselines.neo:NEO",
        "subtract the mean feature before the classifier; no training (Murphy et al., ICLR 2026)",
    ),
    "norm": MethodSpec(
        "remtta.baselines.norm:NORM",
        "batch norms use the batch's statistics; no training (Schneider et al., NeurIPS 2020)",
    ),
    "pseudo-label": MethodSpec(
        "remtta.baselines.pseudo_label:PseudoLabel", "train on the model's own confident predictions (Lee, 2013)"
    ),
    "tent-come": MethodSpec(
        "remtta.baselines.come:TentCOME",
        "Tent with an entropy that includes uncertainty (COME, Zhang et al., ICLR 2025)",
    ),
    "eta": MethodSpec(
        "remtta.baselines.eata:ETA", "minimise the entropy of confident, diverse images (Niu et al., ICML 2022)"
    ),
    "eata": MethodSpec(
        "remtta.baselines.eata:EATA", "ETA with a Fisher penalty, needs clean images (Niu et al., ICML 2022)"
    ),
    "eata-come": MethodSpec("remtta.baselines.come:EATACOME", "EATA with COME's entropy"),
    "rdumb": MethodSpec("remtta.baselines.eata:RDumb", "ETA with periodic resets (Press et al., NeurIPS 2023)"),
    "sar": MethodSpec(
        "remtta.baselines.sar:SAR", "sharpness-aware entropy minimisation on confident images (Niu et al., ICLR 2023)"
    ),
    "sar-come": MethodSpec("remtta.baselines.come:SARCOME", "SAR with COME's entropy"),
    "deyo": MethodSpec(
        "remtta.baselines.deyo:DeYO", "minimise the entropy of images recognised by shape (Lee et al., ICLR 2024)"
    ),
    "zerosiam": MethodSpec(
        "remtta.baselines.zerosiam:ZeroSiam",
        "entropy behind a predictor, aligned with the prediction (Chen et al., ICLR 2026)",
    ),
    "spa": MethodSpec(
        "remtta.baselines.spa:SPA", "views without low frequencies or with noise (Niu et al., ICML 2025)"
    ),
    "roid": MethodSpec(
        "remtta.baselines.roid:ROID", "weighted likelihood ratio, source weights mixed in (Marsden et al., WACV 2024)"
    ),
    "cmf": MethodSpec(
        "remtta.baselines.roid:CMF", "ROID with a Kalman filter over the weights (Lee and Chang, ICLR 2024)"
    ),
    "rem-come": MethodSpec(
        "remtta.baselines.come:REMCOME", "REM with COME's entropy in the ranking", PUBLISHED, REMConfig
    ),
    "cotta": MethodSpec(
        "remtta.baselines.cotta:CoTTA", "mean teacher, random restoration of weights (Wang et al., CVPR 2022)"
    ),
    "rotta": MethodSpec(
        "remtta.baselines.rotta:RoTTA", "a balanced memory of the stream, mean teacher (Yuan et al., CVPR 2023)"
    ),
    "lame": MethodSpec(
        "remtta.baselines.lame:LAME",
        "adjust predictions to similar images of the batch; no training (Boudiaf et al., CVPR 2022)",
    ),
    "memo": MethodSpec(
        "remtta.baselines.memo:MEMO", "adapt to augmented views of each image, then reset (Zhang et al., NeurIPS 2022)"
    ),
    "foa": MethodSpec(
        "remtta.baselines.foa:FOA",
        "search prompts with forward passes only, needs clean images (Niu et al., ICML 2024)",
    ),
    "vida": MethodSpec(
        "remtta.baselines.vida:ViDA", "low- and high-rank adapters, mean teacher (Liu et al., ICLR 2024)"
    ),
    "continual-mae": MethodSpec(
        "remtta.baselines.continual_mae:ContinualMAE",
        "mask uncertain patches: consistency and reconstruction (Liu et al., CVPR 2024)",
    ),
    "petal": MethodSpec(
        "remtta.baselines.cotta:PETAL",
        "CoTTA with the source posterior, needs clean images (Brahma and Rai, CVPR 2023)",
    ),
    "vdp": MethodSpec("remtta.baselines.vdp:VDP", "pixel prompts, mean teacher (Gan et al., AAAI 2023)"),
    "ecotta": MethodSpec(
        "remtta.baselines.ecotta:EcoTTA",
        "meta networks beside a frozen model, needs clean images (Song et al., CVPR 2023)",
    ),
    "becotta": MethodSpec(
        "remtta.baselines.becotta:BECoTTA", "low-rank experts per domain, needs clean images (Lee et al., ICML 2024)"
    ),
}
"""Methods by name."""
