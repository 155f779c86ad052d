"""Convert the bundled model: `python -m openclaw_rl.engines.bundled --cache FOLDER` prints its folder.

The code is in `openclaw_rl.models.resolve`. Scripts that were written before it moved there call this name.
"""

import sys

from openclaw_rl.models.resolve import main

if __name__ == "__main__":
    sys.exit(main())
