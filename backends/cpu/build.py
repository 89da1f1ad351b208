import runpy, pathlib

runpy.run_path(
    str(pathlib.Path(__file__).parent / "polysilicon_cpu/native/build.py"), run_name="__main__"
)
