#define QPN_TILES kTilesPortable
#include "tiles_impl.h"
