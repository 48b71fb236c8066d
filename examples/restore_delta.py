"""Apply a saved delta to its base model, after checking that it fits.

python examples/restore_delta.py run1/delta.safetensors --checkpoint vit.safetensors
"""

from __future__ import annotations

import argparse

from remtta import RemttaError, apply_delta, load_base, load_delta


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("delta")
    parser.add_argument("--checkpoint", help="the base weights, if they are no longer where they were")
    args = parser.parse_args(argv)
    try:
        delta = load_delta(args.delta)
        model = load_base(delta, checkpoint=args.checkpoint)
        apply_delta(model, delta)  # refuses another base, and changes nothing then
    except RemttaError as error:
        raise SystemExit(f"Error: {error}") from None
    print(f"{delta.model} with {len(delta.tensors)} adapted tensors, from {delta.frames} frames of {delta.method}")


if __name__ == "__main__":
    main()
