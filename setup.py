"""The one part that pyproject.toml cannot say: the compiled rotation, left out where there is no compiler."""

import os
import sysconfig

from setuptools import Extension, setup

# Never -ffast-math: in a shared library gcc's startup code would switch denormals off for the whole process.
FLAGS = ["-O3", "-g0", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")  # one build for every later Python, unless without a GIL

setup(
    ext_modules=[
        Extension(
            "ropewalk.kernels._turn",
            ["src/ropewalk/kernels/_turn.c"],
            depends=["src/ropewalk/kernels/_rows.h"],
            extra_compile_args=[] if os.name == "nt" else FLAGS,
            py_limited_api=STABLE,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {},
)
