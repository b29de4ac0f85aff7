"""``python -m vla_cli`` is ``vla``."""

import sys

from vla_cli.main import main

sys.exit(main())
