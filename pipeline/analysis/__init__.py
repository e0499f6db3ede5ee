"""Why a step takes as long as it does. Pure; reads records only."""
