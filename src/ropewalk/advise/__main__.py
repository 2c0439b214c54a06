"""`python -m ropewalk.advise FOLDER` makes measured.json anew from a checkout's benchmarks and study."""

import json
import pathlib
import sys

from ropewalk.advise.measured import PATH, made

PATH.write_text(json.dumps(made(pathlib.Path(sys.argv[1])), indent=1) + "\n")
