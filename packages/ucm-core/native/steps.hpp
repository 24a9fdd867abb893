// Names the instants at which a death or an interleaving would hurt, so that tests can strike there.
#pragma once

// Absent in production: the symbol stays null and a step is one load and one untaken branch. Tests supply it,
// as a preloaded library or as a function of their own binary. `name`: "part.action.done", with static lifetime.
extern "C" __attribute__((weak, visibility("default"))) void ucm_step(const char *name);

// As ucm_step, where the kernel answered something: returns what the caller takes for its answer.
extern "C" __attribute__((weak, visibility("default"))) int ucm_answer(const char *name, int answer);

#define UCM_ANSWER(name, answer) (ucm_answer ? ucm_answer(name, answer) : (answer))

#define UCM_STEP(name)              \
  do {                              \
    if (ucm_step) ucm_step(name);   \
  } while (false)
