#define QPN_TILES kTilesAvx2
#include "tiles_impl.h"
