#define QPN_CODES kCodesAvx2
#define QPN_CODES_NAME "AVX2"
#include "codes_impl.h"
