// The part of a text that each token wrote, from the log probabilities beside the text.

/** A token that wrote text: `from` and `to` are places in the text. */
// { from, to, text, logprob, top: [{ text, logprob }] }

export class TokenText {
  constructor() {
    this.text = "";
    this.tokens = [];
    this._waiting = [];
    this._at = 0;
    this._bytes = [];
  }

  /** Adds a piece of text and its log probabilities, in the API's form. */
  add(text, content) {
    this.text += text;
    for (const entry of content ?? []) this._decode(entry);
    this._align();
  }

  /** Several tokens of one character are shown as one, with the choice of the first token. */
  _decode(entry) {
    if (!entry.bytes) {
      this._waiting.push({ ...chosen(entry), text: entry.token });
      return;
    }
    if (this._bytes.length === 0) this._first = entry;
    this._bytes.push(...entry.bytes);
    try {
      const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true })
        .decode(new Uint8Array(this._bytes));
      this._waiting.push({ ...chosen(this._first), text });
      this._bytes = [];
    } catch {
      if (this._bytes.length > 4) this._bytes = [];
    }
  }

  /** Special tokens write no text and are skipped. */
  _align() {
    while (this._waiting.length && this._at < this.text.length) {
      const token = this._waiting[0];
      const end = this._at + token.text.length;
      if (token.text && this.text.startsWith(token.text, this._at)) {
        this.tokens.push({ ...token, from: this._at, to: end });
        this._at = end;
      } else if (end > this.text.length && token.text.startsWith(this.text.slice(this._at))) {
        return; // the rest of its text has not arrived
      }
      this._waiting.shift();
    }
  }
}

function chosen(entry) {
  const top = (entry.top_logprobs ?? []).map(({ token, logprob }) => ({ text: token, logprob }));
  return { logprob: entry.logprob, top };
}

/** A token as it can be shown: white space is visible. */
export function visible(text) {
  return text.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "(empty)";
}

/** A log probability as a percentage. */
export function percent(logprob) {
  const share = Math.exp(logprob) * 100;
  return share < 0.1 ? "<0.1 %" : `${share.toFixed(1)} %`;
}
