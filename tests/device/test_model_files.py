"""The tests with torch and transformers pass, in a process of their own."""

import importlib.util
import subprocess
import sys

import pytest
from model_files import FILES, TESTS, is_parallel


def test_the_files_with_models_pass(request):
    if not is_parallel(request.config):
        pytest.skip("this process has their tests itself")
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, FILES)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
