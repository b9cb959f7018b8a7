"""`python -m warpi`, for where nothing is installed."""

from warpi.cli import main

raise SystemExit(main())
