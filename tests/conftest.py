"""What all tests need before they import anything."""

from hypothesis import settings

from pat.engine.cpu import environment

# As SGLang needs it, whichever test comes first.
environment.prepare()
# A busy machine is no reason to fail: tests assert no timings.
settings.register_profile("pat", deadline=None)
settings.load_profile("pat")
