#define QPN_TILES kTilesAvx512
#include "tiles_impl.h"
