// Figures from the last minute's events: rates, times, and the steps of each worker.

const KEPT_SECONDS = 60;
const STEP_SECONDS = 12;
// Seconds for rates, and more for times of requests, because requests are fewer.
const RATE_SECONDS = 3;
const TIME_SECONDS = 30;

export class History {
  constructor() {
    this.points = []; // { at, output, prompt, cached, first, per, rate, prefill, ... }
    this._steps = new Map(); // by scheduler and worker
  }

  add(state, at) {
    const point = {
      at,
      first: state.gateway.first_token,
      per: state.gateway.per_token,
      output: 0, prompt: 0, cached: 0, running: 0, waiting: 0, used: 0, total: 0, prefilled: 0,
    };
    for (const scheduler of state.schedulers) {
      point.running += scheduler.running;
      point.waiting += scheduler.waiting;
      point.used += scheduler.used_blocks;
      point.total += scheduler.total_blocks;
      if (!scheduler.snapshot) continue;
      point.output += scheduler.snapshot.output_tokens;
      point.prompt += scheduler.snapshot.prompt_tokens;
      point.cached += scheduler.snapshot.cached_tokens;
      point.prefilled += this._addSteps(scheduler);
    }
    this.points.push(point);
    while (this.points[0].at < at - KEPT_SECONDS) this.points.shift();
    const before = this._before(RATE_SECONDS);
    const seconds = point.at - before.at;
    point.rate = rate(point.output - before.output, seconds);
    const recent = this.points.filter((other) => other.at > before.at);
    point.prefillRate = rate(recent.reduce((all, other) => all + other.prefilled, 0), seconds);
    const past = this._before(TIME_SECONDS);
    point.firstMean = mean(point.first, past.first);
    point.perMean = mean(point.per, past.per);
    point.hitShare = point.prompt ? point.cached / point.prompt : null;
  }

  get latest() {
    return this.points.at(-1);
  }

  /** The latest steps of a worker, oldest first. */
  steps(target, address) {
    return this._steps.get(`${target} ${address}`) ?? [];
  }

  /** Adds a scheduler's steps to its workers; returns how many tokens they prefilled. */
  _addSteps({ target, snapshot }) {
    const { steps, workers, now } = snapshot;
    let prefilled = 0;
    for (let index = 0; index < steps.ended.length; index += 1) {
      prefilled += steps.prefills[index];
      const worker = workers[steps.workers[index] - 1];
      if (!worker) continue;
      const name = `${target} ${worker.address}`;
      if (!this._steps.has(name)) this._steps.set(name, []);
      this._steps.get(name).push({
        ended: steps.ended[index],
        seconds: steps.durations[index] / 1e6,
        decodes: steps.decodes[index],
        prefills: steps.prefills[index],
        copies: steps.copies[index],
      });
    }
    for (const { address } of workers) {
      const kept = this._steps.get(`${target} ${address}`) ?? [];
      // A restarted scheduler has another clock.
      const recent = kept.filter(({ ended }) => ended > now - STEP_SECONDS && ended <= now);
      this._steps.set(`${target} ${address}`, recent);
    }
    return prefilled;
  }

  _before(seconds) {
    const { at } = this.latest;
    return this.points.find((point) => point.at >= at - seconds) ?? this.latest;
  }
}

function rate(count, seconds) {
  return seconds > 0 && count >= 0 ? count / seconds : null;
}

/** The mean of the observations between two states of a sum and a count. */
function mean([sum, count], [sumBefore, countBefore]) {
  return count > countBefore ? (sum - sumBefore) / (count - countBefore) : null;
}
