// Names the instants at which a death or an interleaving would hurt, so that tests can strike there.
#pragma once

// Absent in production: the symbol stays null and a step is one load and one untaken branch. Tests supply it,
// as a preloaded library or as a function of their own binary. `name`: "part.action.done", with static lifetime.
extern "C" __attribute__((weak, visibility("default"))) void ucm_step(const char *name);

#define UCM_STEP(name)              \
  do {                              \
    if (ucm_step) ucm_step(name);   \
  } while (false)
