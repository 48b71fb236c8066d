import pytest


@pytest.fixture(autouse=True)
def _no_thread_outlives_a_stream(no_thread_is_left: None) -> None:
    pass
