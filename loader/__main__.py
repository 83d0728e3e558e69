"""``python -m loader`` is ``qpn``."""

import sys

from loader.command import main

sys.exit(main())
