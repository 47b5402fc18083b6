"""The tests with torch and transformers pass, in a process of their own."""

import importlib.util
import subprocess
import sys

import pytest
from model_files import FILES, TESTS


def test_the_files_with_models_pass(request):
    if any(item.path in FILES for item in request.session.items):
        pytest.skip("this process has tests of these files itself")
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, FILES)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
