# SPDX-License-Identifier: Apache-2.0
"""The demo pair: a small real target model and an EAGLE-3 head trained for it."""
