"""How everything in this folder says no."""


class RefusalError(Exception):
    """Nothing was changed; the text is one sentence for the operator, without its full stop."""
