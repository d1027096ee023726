# SPDX-License-Identifier: Apache-2.0
"""ECHO itself: the stages, the tensors between them, and what they decide by. Knows no engine.

In the order of a step (``pipeline.py`` is the page to read first):

    draft -> gate -> schedule -> pack -> verify -> accept -> commit

=================  ============================================================================
``tree``           the tensors that cross stages
``decision``       what is decided about a step before it drafts; ``shape``: how far and how wide
``policies``       echo, goodput and their relatives: each makes one decision a step
``budget``         how much there is to spend, by ``cost``, what a step costs, and the load
``watch``          the cost curve, corrected by served steps: one ``trial`` after another;
                   ``sweep``: how one is measured at a start
``draft``          grow candidate trees layer by layer
``score``          what a node is worth, by the head and by ``acceptance``, its calibration
``gate``           may a request go deeper?
``schedule``       order all candidates, admit as many as the budget holds
``pack``           flatten all trees into the rows of one target forward
``accept``         which path the target agrees with
``commit``         the KV of that path becomes the linear prefix
``config``         every option, validated (``config_file``, ``checks``)
``stats``          what a step did, in counts; ``trace``: what was drafted, kept; ``timing``
=================  ============================================================================
"""
