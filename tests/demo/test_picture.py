from __future__ import annotations

import numpy as np

from remtta.demo.picture import paint_over


def test_a_picture_is_hatched_where_patches_are_left_out() -> None:
    pixels = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    painted = paint_over(pixels, [0, 4], (2, 2))  # of two rows of three patches
    grey = np.array([[False, True, True], [True, False, True]]).repeat(2, 0).repeat(2, 1)
    assert sorted(set(painted[grey].flatten().tolist())) == [70, 235]
    assert painted[0, 2:, 0].tolist() == [70, 235] * 2 and painted[1, 2:, 0].tolist() == [235, 70] * 2  # diagonally
    assert (painted[~grey] == pixels[~grey]).all()
