"""Set up eight virtual devices: these modules create JAX's backend when pytest imports them."""

from tests import eight_devices

eight_devices.set_up()
