"""`remtta demo`."""


def demo() -> None:
    """x"""
