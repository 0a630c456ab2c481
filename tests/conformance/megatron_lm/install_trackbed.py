"""A pytest plugin: Megatron-LM's tests run on Trackbed instead of Megatron Core."""

import trackbed.megatron

trackbed.megatron.install()
