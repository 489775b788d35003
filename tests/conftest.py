"""What all tests share: hypothesis without a deadline, since a busy machine is no fault of the code."""

from hypothesis import settings

settings.register_profile("pushrep", deadline=None)
settings.load_profile("pushrep")
