"""What is shipped: the example of the README, the types, the names."""

import inspect
import pathlib
import re
import subprocess
import sys

import diskwright

HERE = pathlib.Path(__file__).resolve().parent.parent


def test_the_example_of_the_readme_runs(tmp_path):
    [example] = re.findall(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.S)
    ran = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "b'golden image'" in ran.stdout and "not_found - nothing.vhdx" in ran.stdout


def test_codes_in_the_readme_are_those_of_the_library():
    source = (HERE.parent / "store/src/code.rs").read_text()
    codes = re.findall(r'Self::\w+ => "(\w+)"', source)
    readme = (HERE / "README.md").read_text()
    assert len(codes) > 15 and [code for code in codes if f"`{code}`" not in readme] == []


def test_everything_public_is_typed():
    folder = pathlib.Path(diskwright.__file__).parent
    assert (folder / "py.typed").exists()
    stub = (folder / "__init__.pyi").read_text()
    for name in diskwright.__all__:
        assert re.search(rf"^(class|def) {name}\b", stub, re.M), name
    values = [cls for cls in (getattr(diskwright, name) for name in diskwright.__all__) if isinstance(cls, type)]
    plain = [cls for cls in values if cls not in (diskwright.Disk, diskwright.DiskFile, diskwright.DiskError)]
    assert len(plain) > 12
    for cls in plain:
        body = re.search(rf"^class {cls.__name__}:\n((?:    .*\n)+)", stub, re.M).group(1)
        typed = set(re.findall(r"^    (\w+):", body, re.M))
        real = {name for name in dir(cls) if not name.startswith("_")}
        assert typed == real, cls


def test_keywords_of_the_stub_are_those_of_the_module():
    stub = (pathlib.Path(diskwright.__file__).parent / "__init__.pyi").read_text()

    def stubbed(name):
        body = re.search(rf"^class {name}\(.*\):\n((?:    .*\n)+)", stub, re.M).group(1)
        return set(re.findall(r"^    (\w+):", body, re.M))

    def real(function):
        parameters = inspect.signature(function).parameters.values()
        return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}

    read, opened = stubbed("_ReadOptions"), stubbed("_OpenOptions")
    assert real(diskwright._native.Disk) == read | opened
    assert real(diskwright.info) == real(diskwright.check) == read | {"format"}
    assert read < real(diskwright.convert)
    parents = stubbed("_ParentOptions")
    for name in ("snapshot", "revert", "merge", "compact", "move", "rescue", "judge"):
        body = re.search(rf"^def {name}\(\n((?:    .*\n)+)", stub, re.M).group(1)
        own = set(re.findall(r"^    (\w+):", body.split("*,\n")[1], re.M))
        assert real(getattr(diskwright, name)) == own | parents, name
