# SPDX-License-Identifier: Apache-2.0
"""The draft head: does it fit the served model, and is every weight of it accounted for?

==============  ================================================================================
``check``       the questions asked before an engine starts, in order
``form``        what vLLM's model classes read from the head's configuration
``files``       the tensors of a local folder, mapped and not read
``parameters``  the parameters that vLLM's model of it will have
``accounting``  those against the tensors that there are
``vocabulary``  the map from draft tokens to the target's
``loading``     the same in the worker, for heads from the hub too; what vLLM leaves to be done
==============  ================================================================================
"""
