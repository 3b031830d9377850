import pytest

pytest.register_assert_rewrite("lachesis_testing.engine_suite")
