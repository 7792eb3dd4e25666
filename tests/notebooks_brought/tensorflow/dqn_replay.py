# framework: tensorflow
# compare: losses; q_table; episode_rewards; model_target.get_weights()

# %% [markdown]
# # Deep Q-learning in a corridor
#
# The agent starts in the middle of nine fields and looks for the exit on the right.

# %%
from collections import deque

import numpy as np
import tensorflow as tf
from tensorflow import keras

# %% Configuration
seed = 42
gamma = 0.95
epsilon = 1.0
epsilon_min = 0.2
batch_size = 32
max_steps_per_episode = 20
num_episodes = 8
update_target_network = 25
num_actions = 2

rng = np.random.default_rng(seed)
keras.utils.set_random_seed(seed)


# %%
class Corridor:
    size = 9

    def reset(self):
        self.pos = self.size // 2
        return self.observe()

    def observe(self):
        return np.eye(self.size, dtype="float32")[self.pos]

    def step(self, action):
        self.pos = max(0, self.pos + (1 if action == 1 else -1))
        done = self.pos == self.size - 1
        return self.observe(), (1.0 if done else -0.05), done


env = Corridor()


# %%
def create_q_model():
    return keras.Sequential(
        [
            keras.Input((Corridor.size,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(num_actions, activation="linear"),
        ]
    )


model = create_q_model()
model_target = create_q_model()
model_target.set_weights(model.get_weights())

optimizer = keras.optimizers.Adam(learning_rate=0.01, clipnorm=1.0)
loss_function = keras.losses.Huber()

replay = deque(maxlen=500)
losses = []
episode_rewards = []
frame_count = 0

# %%
for episode in range(num_episodes):
    state = env.reset()
    episode_reward = 0.0

    for timestep in range(max_steps_per_episode):
        frame_count += 1

        # Use epsilon-greedy for exploration
        if rng.random() < epsilon:
            action = int(rng.integers(num_actions))
        else:
            action_probs = model(state[np.newaxis], training=False)
            action = int(tf.argmax(action_probs[0]).numpy())
        epsilon = max(epsilon - 0.01, epsilon_min)

        state_next, reward, done = env.step(action)
        replay.append((state, action, reward, state_next, float(done)))
        episode_reward += reward
        state = state_next

        # Update every second frame once there is enough in the buffer
        if frame_count % 2 == 0 and len(replay) >= batch_size:
            indices = rng.choice(len(replay), size=batch_size, replace=False)
            states, actions, rewards, next_states, dones = (
                np.array(column) for column in zip(*[replay[i] for i in indices])
            )

            future_rewards = model_target(next_states)
            updated_q = rewards + gamma * tf.reduce_max(future_rewards, axis=1) * (1 - dones)
            masks = tf.one_hot(actions, num_actions)

            with tf.GradientTape() as tape:
                q_values = model(states)
                q_action = tf.reduce_sum(tf.multiply(q_values, masks), axis=1)
                loss = loss_function(updated_q, q_action)

            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables))
            losses.append(float(loss))

        if frame_count % update_target_network == 0:
            model_target.set_weights(model.get_weights())

        if done:
            break

    episode_rewards.append(episode_reward)
    print(f"episode {episode}: reward {episode_reward:.2f}, epsilon {epsilon:.2f}")

# %% What did it learn?
q_table = model(np.eye(Corridor.size, dtype="float32")).numpy()
print("policy:", "".join("<>"[a] for a in q_table.argmax(axis=1)))
