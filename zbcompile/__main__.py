"""``python -m zbcompile`` is the command line."""

from __future__ import annotations

import sys

from zbcompile.cli.main import main

sys.exit(main())
