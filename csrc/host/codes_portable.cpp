#define QPN_CODES kCodesPortable
#define QPN_CODES_NAME "portable"
#include "codes_impl.h"
