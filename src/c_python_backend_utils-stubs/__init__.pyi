# Type information for what models import: the very module that they get in a stub.
from moonpool.stub.pb_utils import *
