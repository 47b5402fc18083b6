"""llama_cpp.load with a ggml of the test's own: which library it gets, and what is refused."""

import os
import sys
import types

import pytest

from zinc_attn.errors import ArgumentError, RuntimeUnavailableError
from zinc_attn.integrations import llama_cpp


@pytest.fixture
def ggml(monkeypatch):
    """The paths that ggml is asked to load; it takes those that end in .so."""
    asked = []

    def register(path: bytes) -> int:
        asked.append(path)
        return int(path.endswith(b".so"))

    bound = types.SimpleNamespace(_lib=types.SimpleNamespace(ggml_backend_load=register))
    monkeypatch.setattr(llama_cpp.importlib, "import_module", {"llama_cpp.llama_cpp": bound}.__getitem__)
    monkeypatch.delenv("GGML_BACKEND_PATH", raising=False)
    return asked


def test_the_library_is_the_argument_or_the_variable_s(ggml, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("given.so", "named.so"):
        (tmp_path / name).touch()
    llama_cpp.load("given.so")
    monkeypatch.setenv("GGML_BACKEND_PATH", "named.so")
    llama_cpp.load()
    assert ggml == [os.fsencode(tmp_path / "given.so"), os.fsencode(tmp_path / "named.so")]


def test_what_cannot_be_loaded_is_refused(ggml, monkeypatch, tmp_path):
    with pytest.raises(ArgumentError, match=r"^library: got none, expected the path of libggml-zinc\.so"):
        llama_cpp.load()
    with pytest.raises(ArgumentError, match=r"^/no\.so: cannot be read: No such file or directory; expected libggml-"):
        llama_cpp.load("/no.so")
    with pytest.raises(RuntimeUnavailableError, match=r"^ggml does not take .*\.py: the reason is on stderr"):
        llama_cpp.load(__file__)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(RuntimeUnavailableError, match=r"^llama-cpp-python is not installed"):
        llama_cpp.load(__file__)
    monkeypatch.delitem(sys.modules, "llama_cpp")
    (tmp_path / "llama_cpp").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    old = "version `GLIBC_2.38' not found"
    for folder, error, advice in (
        ("", "no libllama", r"; name the folder of libllama\.so in \$LLAMA_CPP_LIB_PATH"),
        ("/here", "no libllama", r"; \$LLAMA_CPP_LIB_PATH: got /here, expected the folder of a libllama\.so"),
        ("/here", old, "; that llama.cpp was built on a later system: build it on this one"),
    ):
        monkeypatch.setenv("LLAMA_CPP_LIB_PATH", folder)
        (tmp_path / "llama_cpp" / "__init__.py").write_text(f"raise RuntimeError({error!r})")
        with pytest.raises(RuntimeUnavailableError, match=f"{error}{advice}"):
            llama_cpp.load(__file__)
