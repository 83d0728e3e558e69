#define QPN_CODES kCodesAvx512
#define QPN_CODES_NAME "AVX-512"
#include "codes_impl.h"
