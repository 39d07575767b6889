"""Settings of every test: a busy machine is slow, and slow is not wrong."""

from hypothesis import HealthCheck, settings

settings.register_profile("pomona", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pomona")
